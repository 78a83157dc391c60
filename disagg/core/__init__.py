"""Types, configuration, errors and protocols. This package imports no other package of this project."""
