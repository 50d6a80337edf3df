"""What a job did to its GPU and its node, as numbers: sampler, streaming statistics, the record and its spool."""
