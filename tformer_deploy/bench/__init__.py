"""What ``bench`` measures: times, memory, and the share of this machine's limits that they reach."""
