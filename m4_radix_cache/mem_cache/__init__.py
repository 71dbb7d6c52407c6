"""KV memory on the scheduler's side: free slots, slots of requests, and the prefix caches."""
