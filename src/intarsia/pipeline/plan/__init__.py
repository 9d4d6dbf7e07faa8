"""Planning of pipelines: clusters, costs by layer, simulated schedules, the search, charts."""
