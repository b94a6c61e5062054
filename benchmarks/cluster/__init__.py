"""Two engines, two sidecars and Redis in processes of their own, requests to the engines, and texts of the sidecars."""
