"""The Vision Transformer that every stage shares: configuration, network, weight files, preprocessing."""
