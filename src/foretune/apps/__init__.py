"""Ready-made applications, as scikit-learn estimators: `pip install "foretune[apps]"`."""

from ._cleaner import LabelCleaner as LabelCleaner

__all__ = ["LabelCleaner"]
