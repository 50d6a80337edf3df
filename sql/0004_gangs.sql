-- Two gangs share all GPUs of a node: gpu_index is the first of them.
ALTER TABLE sharing ADD COLUMN /*! IF NOT EXISTS */ gpus INTEGER NOT NULL DEFAULT 1;
