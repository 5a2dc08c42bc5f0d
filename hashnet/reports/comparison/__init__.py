"""Methods side by side: cells (method x code length x seed), the tables and figures of the paper."""
