"""Files on disk become weights and hyper-parameters."""
