"""A recipe: YAML to a checked pipeline (`load`), matrices expanded (`matrix`), the stages' order (`pipeline`)."""
