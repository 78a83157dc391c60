"""Building a rank's model: source, configuration, weights."""
