"""Types, configuration, errors and ports. Imports no other package of this project."""
