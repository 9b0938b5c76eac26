"""Files of weights and config.json, and the text model that they make."""
