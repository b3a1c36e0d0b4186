"""Annotations of boxes in the formats of COCO, YOLO, Pascal VOC and KITTI: from a file's bytes to boxes."""
