-- Of a span, how long one of the two stood still: no time beside each other.
ALTER TABLE sharing ADD COLUMN /*! IF NOT EXISTS */ paused_s BIGINT NOT NULL DEFAULT 0;
