"""Which blocks live on which worker rank."""
