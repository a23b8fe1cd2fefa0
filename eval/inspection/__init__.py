"""`retain describe`: a model by its config (`model`); `retain doctor`: what this installation can do."""
