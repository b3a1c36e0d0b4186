"""Steps of the same training by ours and by others, in pairs of processes."""
