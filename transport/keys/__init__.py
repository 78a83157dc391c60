"""The cluster's CURVE keys: made, stored, followed and rotated."""
