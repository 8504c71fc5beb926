"""Real-time tuning: forward mode carried along the training itself."""
