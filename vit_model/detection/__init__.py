"""Detection of objects with a plain ViT: boxes, the pyramid behind the last layer, the FCOS head and its loss."""
