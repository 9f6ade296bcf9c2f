"""HTML reports: markup, charts, and the page that holds them. Knows no runs."""
