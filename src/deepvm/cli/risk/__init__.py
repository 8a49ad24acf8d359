"""What ``deepvm plan`` shows of plans under a spot market: recommendations in; tables, a drawing and figures out."""
