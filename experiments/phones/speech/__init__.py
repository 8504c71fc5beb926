"""Speech with phones: TIMIT, synthetic speech, and the features of both."""
