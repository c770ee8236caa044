"""The cheapest setting that survives: of each defense the weakest strength under which nothing leaks, and what it costs."""
