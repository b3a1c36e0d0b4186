"""Running a pipeline: `plan` computes keys, `driver` makes what is missing, `runs` and `logs` tell what happened."""
