{{- /* Pod of a rank on another node than rank 0: (dict "root" $ "group" …). It has no port: rank 0 answers for its group. */}}
{{- define "diptych.rank" -}}
{{- $root := .root }}
{{- $group := .group }}
{{- $values := $group.values }}
{{- $path := $group.path | default $root.Values.model.path }}
{{- include "diptych.pod" (dict "root" $root "component" $group.role "model" $group.model "values" $values "grace" 10) }}
containers:
  - name: rank
    image: {{ include "diptych.image" $root }}
    args:
      - rank
      - $(LWS_LEADER_ADDRESS):7001
      - --rank-key-file=/access/ranks/rank-key
      {{- if $root.Values.model.claim }}
      - {{ printf "--model=/models/%s" $path | quote }}
      {{- end }}
    env: []
    ports: []
    resources: {{- toYaml $values.resources | nindent 6 }}
    securityContext: {{- include "diptych.security" $root | nindent 6 }}
    volumeMounts:
      - {name: rank-key, mountPath: /access/ranks, readOnly: true}
      {{- if $root.Values.model.claim }}
      - {name: models, mountPath: /models, readOnly: true}
      {{- end }}
volumes:
  {{- include "diptych.rankKey" $root | nindent 2 }}
  {{- with $root.Values.model.claim }}
  - {name: models, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
  {{- end }}
{{- end }}
