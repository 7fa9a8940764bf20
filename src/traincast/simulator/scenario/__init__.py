"""What was asked, resolved: names and files become workloads, platforms and tasks, and are answered."""
