"""Problems: a training procedure, its data and its error, and what engines make of them."""
