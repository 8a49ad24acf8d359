"""The user's state to named tensors, a JSON skeleton and a file layout, and back."""
