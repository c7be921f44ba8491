"""The demo: simulated engines and a router, the same work under two policies, side by side."""
