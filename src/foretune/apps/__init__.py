"""Ready-made applications, as scikit-learn estimators: `pip install "foretune[apps]"`."""

from ._optional import needs

with needs("apps", "foretune.apps"):
    import sklearn  # noqa: F401

from ._label_cleaner import LabelCleaner as LabelCleaner
from ._predictions import clean_labels as clean_labels

__all__ = ["LabelCleaner", "clean_labels"]
