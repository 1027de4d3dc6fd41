"""Groups of torch's processes, and connections of our own between them."""
