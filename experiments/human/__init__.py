"""Human label noise: CIFAR-10N."""
