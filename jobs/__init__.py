"""Entry points: key=value words → configuration → one call into cluster/ → one JSON line."""
