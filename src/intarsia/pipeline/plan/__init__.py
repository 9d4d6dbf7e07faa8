"""What a pipeline is planned with: clusters, costs by layer, simulated schedules, the search, pictures."""
