"""Reference answers of unsplit engines, and the verdict of a comparison with them."""
