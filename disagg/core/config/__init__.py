"""Configuration: one frozen, validated tree, read from files, the environment and flags."""
