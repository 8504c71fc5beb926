"""Few-shot learning of letters of scripts that were not seen."""
