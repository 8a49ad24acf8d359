"""Templates that fork workers, and PyTorch's elastic agent above them."""
