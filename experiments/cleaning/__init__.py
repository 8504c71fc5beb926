"""Data hyper-cleaning: which training labels are wrong?"""
