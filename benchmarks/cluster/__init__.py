"""Two engines, two sidecars, Redis and a router: what sharing gains, how soon, its cost, and the effects of faults."""
