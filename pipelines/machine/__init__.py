"""Checks of the store, Ray and this machine (`doctor`), and recipes for folders of images (`init`).

Imports inside functions are heavy (boto3, Pillow, torch through ray_jobs), and not every use needs them.
"""
