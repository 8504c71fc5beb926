"""Data attribution: what each training example did to each error."""
