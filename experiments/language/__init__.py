"""Which text makes a language model better at other text? Mixtures and schedules of a transformer."""
