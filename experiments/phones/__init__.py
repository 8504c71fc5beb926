"""Phone classification: a speech network tuned while it trains."""
