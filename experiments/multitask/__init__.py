"""Learning task interactions: which classes help each other?"""
