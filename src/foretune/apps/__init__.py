"""Ready-made applications, as scikit-learn estimators: `pip install "foretune[apps]"`."""

from ._optional import needs

with needs("apps", "foretune.apps"):
    import sklearn  # noqa: F401

from ._clean_labels import CleanedLabels as CleanedLabels
from ._clean_labels import clean_labels as clean_labels
from ._cleaner import LabelCleaner as LabelCleaner
from ._value_cleaner import ValueCleaner as ValueCleaner
from ._values import CleanedValues as CleanedValues
from ._values import clean_values as clean_values

__all__ = [
    "CleanedLabels",
    "CleanedValues",
    "LabelCleaner",
    "ValueCleaner",
    "clean_labels",
    "clean_values",
]
