"""Entry points: parse → config → one call into cluster/ → one JSON line."""
