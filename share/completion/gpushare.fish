_GPUSHARE_COMPLETE=fish_source gpushare | source
