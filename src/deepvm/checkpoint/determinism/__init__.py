"""Everything beside the state that makes a resumed step the same step."""
