-- What was written and never read; and a name that says what the table is: a ban fades.
ALTER TABLE profile DROP COLUMN /*! IF EXISTS */ model_version;
ALTER TABLE profile DROP COLUMN /*! IF EXISTS */ restarted_s;
ALTER TABLE decision DROP COLUMN /*! IF EXISTS */ partner_rate;
ALTER TABLE cpu_curve DROP COLUMN /*! IF EXISTS */ points;
ALTER TABLE /*! IF EXISTS */ never_pair RENAME TO ban;
