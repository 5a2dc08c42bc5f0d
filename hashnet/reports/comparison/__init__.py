"""What a comparison found: its tables, figures and page."""
