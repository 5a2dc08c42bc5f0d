"""Methods side by side: cells (method x code length x seed), the paper's tables and figures."""
