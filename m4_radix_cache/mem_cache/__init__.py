"""KV memory seen from the scheduler: which slots are free, which belong to whom, and which hold what others may use."""
